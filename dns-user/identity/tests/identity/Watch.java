import java.nio.file.*;
import java.security.*;
import java.security.cert.CertificateFactory;
import java.security.cert.X509Certificate;
import java.security.spec.PKCS8EncodedKeySpec;
import java.util.*;

/**
 * Watches a pair as the Java buildpack's security provider does: a WatchService on the folder, and a
 * reload once both files were updated. Spring Boot's SSL bundles use the same service and compare names.
 */
public class Watch {
    public static void main(String[] arguments) throws Exception {
        Path folder = Path.of(arguments[0]);
        WatchService service = FileSystems.getDefault().newWatchService();
        folder.register(service, StandardWatchEventKinds.ENTRY_CREATE, StandardWatchEventKinds.ENTRY_MODIFY);
        System.out.println("ready");
        Set<String> updated = new HashSet<>();
        while (true) {
            WatchKey key = service.take();
            for (WatchEvent<?> event : key.pollEvents()) {
                String name = String.valueOf(event.context());
                if (name.equals("instance.crt") || name.equals("instance.key")) {
                    updated.add(name);
                }
            }
            key.reset();
            if (updated.size() == 2) {
                updated.clear();
                System.out.println(matches(folder) ? "reloaded" : "mismatched");
            }
        }
    }

    static boolean matches(Path folder) throws Exception {
        X509Certificate certificate;
        try (var stream = Files.newInputStream(folder.resolve("instance.crt"))) {
            certificate = (X509Certificate) CertificateFactory.getInstance("X.509").generateCertificate(stream);
        }
        String pem = Files.readString(folder.resolve("instance.key"));
        byte[] der = Base64.getMimeDecoder().decode(pem.replaceAll("-----[A-Z ]+-----", ""));
        PrivateKey key = KeyFactory.getInstance("EC").generatePrivate(new PKCS8EncodedKeySpec(der));
        Signature signer = Signature.getInstance("SHA256withECDSA");
        signer.initSign(key);
        signer.update(der);
        byte[] signature = signer.sign();
        signer.initVerify(certificate.getPublicKey());
        signer.update(der);
        return signer.verify(signature);
    }
}
